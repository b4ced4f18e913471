"use strict";
// The numbers come from the element #data as they were recorded; only the explorer works anything out.
(async () => {
  // The charting library comes packed, to a third of its size.
  const packed = Uint8Array.from(atob(document.getElementById("plotly").textContent), (c) => c.charCodeAt(0));
  const unpacked = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const library = document.createElement("script");
  library.textContent = await new Response(unpacked).text();
  document.head.append(library);

  const data = JSON.parse(document.getElementById("data").textContent);
  const at = (id) => document.getElementById(id);
  const fixed = (value, digits = 1) => (value == null ? "–" : value.toFixed(digits).replace("-", "−"));

  const narrow = () => innerWidth < 560;
  const brief = (name) => {
    const most = narrow() ? 8 : 14;
    return name.length > most ? `${name.slice(0, most - 1)}…` : name;
  };

  // A rule with options as one reads it: `ode:guidance=0.2` is "ode, guidance=0.2".
  const called = (rule) => rule.replaceAll(":", ", ");

  // Colours ----------------------------------------------------------------------------------------------------------
  // Told apart with colour-blind eyes too, and by dash and marker in black and white.
  const LIGHT = ["#0072b2", "#d55e00", "#007d60", "#b8578f", "#b98000", "#3a8fc4", "#6a51a3", "#a6343c", "#4d7a2a", "#8c6d46", "#2b7f7a", "#5f6773"];
  const DARK = ["#56b4e9", "#ff9248", "#2fd0a5", "#f09bcb", "#f2c14e", "#9bd4ff", "#b9a5ee", "#ff8a8a", "#a8d67a", "#d9bd95", "#6fd6cf", "#b3bdcb"];
  const DASHES = ["solid", "dash", "dot", "dashdot", "longdash"];
  const MARKS = ["circle", "square", "diamond", "triangle-up", "cross", "x", "star"];
  const probe = document.body.appendChild(document.createElement("i"));
  probe.hidden = true;
  const tone = (name) => {
    probe.style.color = `var(--${name})`;
    return getComputedStyle(probe).color;
  };
  let printing = false;
  const dark = () => {
    if (printing) return false;
    const chosen = document.documentElement.dataset.theme;
    return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  };
  const palette = () => (dark() ? DARK : LIGHT);
  const clear = (hex, alpha) => hex + Math.round(alpha * 255).toString(16).padStart(2, "0");
  const scale = () => [[0, tone("low")], [1, tone("high")]];
  const look = (index) => ({
    color: palette()[index % palette().length],
    dash: DASHES[index % DASHES.length],
    symbol: MARKS[index % MARKS.length],
  });

  // Drawing ----------------------------------------------------------------------------------------------------------
  const charts = [];
  // No axis of accuracies goes past 100 %, and a flat course is not blown up.
  const percents = (values) => {
    const low = Math.min(...values), high = Math.max(...values), room = Math.max(5, 0.08 * (high - low));
    return [Math.max(0, low - room), Math.min(100, high + room)];
  };

  const draw = (id, make) => {
    const box = at(id);
    if (!box) return () => {};
    const paint = () => {
      const { traces, layout = {} } = make();
      const axis = { gridcolor: tone("line"), zerolinecolor: tone("line"), linecolor: tone("line"), automargin: true };
      Plotly.react(box, traces, {
        paper_bgcolor: "rgba(0,0,0,0)",
        plot_bgcolor: "rgba(0,0,0,0)",
        font: { color: tone("ink"), family: getComputedStyle(document.body).fontFamily, size: 12 },
        margin: { l: 48, r: 14, t: 14, b: 42 },
        hoverlabel: { bgcolor: tone("card"), bordercolor: tone("line"), font: { color: tone("ink") } },
        showlegend: false,
        dragmode: false,
        ...layout,
        xaxis: { ...axis, ...layout.xaxis },
        yaxis: { ...axis, ...layout.yaxis },
      }, { displayModeBar: false, responsive: true, doubleClick: false });
    };
    charts.push(paint);
    paint();
    return paint;
  };
  const repaint = () => charts.forEach((paint) => paint());
  const options = (select, pairs, chosen) => {
    select.replaceChildren(...pairs.map(([value, text]) => new Option(text, value, false, String(value) === String(chosen))));
  };

  // Theme ------------------------------------------------------------------------------------------------------------
  const recolour = () => {
    document.querySelectorAll("[data-rule]").forEach((mark) => {
      mark.style.background = look(ruleIndex(mark.dataset.rule)).color;
    });
    document.querySelectorAll(".chip").forEach((chip) => {
      chip.style.setProperty("--c", look(ruleIndex(chip.title)).color);
    });
    repaint();
  };
  at("theme").addEventListener("click", () => {
    document.documentElement.dataset.theme = dark() ? "light" : "dark";
    recolour();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolour);
  addEventListener("beforeprint", () => { printing = true; recolour(); });
  addEventListener("afterprint", () => { printing = false; recolour(); });

  // A table that sorts -----------------------------------------------------------------------------------------------
  document.querySelectorAll(".sortable").forEach((table) => {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") !== "descending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const value = (row) => row.cells[column].dataset.v;
      const rows = [...table.tBodies[0].rows].sort((a, b) => {
        const gap = Number(value(a)) - Number(value(b));
        return (down ? -1 : 1) * (Number.isNaN(gap) ? value(a).localeCompare(value(b)) : gap);
      });
      table.tBodies[0].append(...rows);
    }));
  });

  const rules = data.kind === "run" ? data.description.rules : [];
  const ruleIndex = (rule) => Math.max(0, rules.indexOf(rule));

  // Loss along trajectories: fold k lies between k and k + 1, stretched to its own operating time ----------------------
  const drawLoss = (paths) => draw("loss-chart", () => {
    const chosen = paths();
    const line = (name, ys, style, legend) => ({
      x: [], y: [], text: [], name, mode: "lines", showlegend: legend, hovertemplate: `%{text}<br>${name} %{y:.4f}<extra></extra>`, ...style, ys,
    });
    const traces = [
      line("straight line", (p, t) => p.loss_start + t * (p.loss_target - p.loss_start), { line: { color: tone("soft"), dash: "dot", width: 1.2 } }, true),
      line("bound on the loss", (p, t) => p.loss_start + t * Math.max(p.loss_target - p.loss_start, 0), { line: { color: tone("warm"), dash: "dash", width: 1.6 } }, true),
      line("loss", (p, t, i) => p.losses[i], { line: { color: tone("accent"), width: 2.6 }, mode: "lines+markers", marker: { size: 4 } }, true),
    ];
    chosen.forEach((path, k) => traces.forEach((trace) => {
      path.times.forEach((t, i) => {
        trace.x.push(k + (path.until ? t / path.until : 0) * 0.92);
        trace.y.push(trace.ys(path, t, i));
        trace.text.push(`${path.task}, t = ${t.toFixed(3)}`);
      });
      trace.x.push(null); trace.y.push(null); trace.text.push("");
    }));
    traces.forEach((trace) => delete trace.ys);
    // The room between straight line and bound, one shape a fold.
    chosen.forEach((path, k) => {
      const gap = path.loss_target - path.loss_start, right = k + 0.92;
      traces.unshift({
        x: [k, right, right], y: [0, path.until * gap, path.until * Math.max(gap, 0)].map((rise) => path.loss_start + rise),
        fill: "toself", fillcolor: clear(dark() ? "#ffa05c" : "#b94a00", 0.12), line: { width: 0 }, mode: "lines", hoverinfo: "skip", showlegend: false,
      });
    });
    const held = chosen.filter((p) => p.certified).length;
    const worst = chosen.reduce((most, p) => Math.max(most, p.barrier), 0);
    at("path-facts").textContent = `Envelope held on ${held} of ${chosen.length} trajectories; largest barrier ${fixed(worst, 4)}. Each stretch runs from t = 0 to the fold's operating time.`;
    return {
      traces,
      layout: {
        showlegend: true,
        legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 },
        margin: { l: 48, r: 14, t: 34, b: 42 },
        xaxis: { tickvals: chosen.map((_, k) => k + 0.46), ticktext: chosen.map((p) => `${p.fold} ${brief(p.task)}`), showgrid: false, zeroline: false },
        yaxis: { title: { text: "calibration loss" } },
      },
    };
  });

  if (data.kind === "trunk") {
    draw("drift-chart", () => ({
      traces: [
        { x: data.drift.map((d) => d.step), y: data.drift.map((d) => d.norm), name: "deployed model", mode: "lines+markers", line: { color: tone("accent"), width: 2.4 }, marker: { size: 9 }, hovertemplate: "step %{x}: %{y:.4g}<extra></extra>" },
        { x: data.arrivals.map((a) => data.held.find((h) => h.task === a.task).step), y: data.arrivals.map((a) => a.norm), text: data.arrivals.map((a) => a.task), name: "arrival's own update", mode: "markers", marker: { size: 10, symbol: "diamond-open", color: tone("warm"), line: { width: 2 } }, hovertemplate: "%{text}: %{y:.4g}<extra></extra>" },
      ],
      layout: {
        showlegend: true,
        legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 },
        margin: { l: 48, r: 14, t: 34, b: 42 },
        xaxis: { title: { text: "step" }, dtick: Math.max(1, Math.ceil(data.journal.length / 12)), range: [-0.4, data.journal.length - 0.6] },
        yaxis: { rangemode: "tozero" },
      },
    }));
    const judged = [...new Set(data.judged.flatMap((row) => Object.keys(row.scores)))];
    if (judged.length) draw("accuracy-chart", () => ({
      traces: judged.flatMap((task, i) => {
        const { color, dash, symbol } = look(i);
        const rows = data.judged.filter((row) => task in row.scores), own = data.judged.filter((row) => task in row.alone);
        return [
          { x: rows.map((row) => row.step), y: rows.map((row) => row.scores[task]), text: rows.map((row) => row.what), name: task, legendgroup: task, mode: "lines+markers", cliponaxis: false, line: { color, dash, width: 2.2 }, marker: { symbol, size: 8, color }, hovertemplate: `${task} %{y:.1f}<br>after step %{x}, %{text}<extra></extra>` },
          { x: own.map((row) => row.step), y: own.map((row) => row.alone[task]), name: task, legendgroup: task, showlegend: false, cliponaxis: false, mode: "markers", marker: { symbol: `${symbol}-open`, size: 11, color, line: { width: 2 } }, hovertemplate: `arrival ${task} alone %{y:.1f}<extra></extra>` },
        ];
      }),
      layout: {
        showlegend: true,
        legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 },
        margin: { l: 48, r: 14, t: 34, b: 42 },
        xaxis: { title: { text: "step" }, dtick: Math.max(1, Math.ceil(data.journal.length / 12)), range: [-0.4, data.journal.length - 0.6] },
        yaxis: { title: { text: "accuracy" }, range: percents(data.judged.flatMap((row) => [...Object.values(row.scores), ...Object.values(row.alone)])) },
      },
    }));
    const names = data.arrivals.map((a) => a.task);
    if (data.cosines) draw("cosine-chart", () => ({
      traces: [{ type: "heatmap", x: names, y: names, z: data.cosines, zmin: Math.min(0, ...data.cosines.flat()), zmax: 1, colorscale: scale(), texttemplate: names.length < 12 ? "%{z:.2f}" : "", hovertemplate: "%{y} and %{x}: %{z:.4f}<extra></extra>", xgap: 2, ygap: 2, colorbar: { thickness: 10, outlinewidth: 0 } }],
      layout: { yaxis: { autorange: "reversed", showgrid: false }, xaxis: { showgrid: false } },
    }));
    if (data.trajectories.length) drawLoss(() => data.trajectories);
    return;
  }

  // Which rules and which stream length are shown --------------------------------------------------------------------
  const lengths = [...new Set(data.courses.map((c) => c.length))].sort((a, b) => a - b);
  let length = lengths[lengths.length - 1];
  const courses = () => data.courses.filter((c) => c.length === length);
  const ranked = courses().slice().sort((a, b) => b.acc[length - 1] - a.acc[length - 1]).map((c) => c.rule);
  const shown = new Set(ranked.slice(0, 5).concat(rules.includes("average") ? ["average"] : []));
  options(at("length"), lengths.map((n) => [n, `${n} tasks`]), length);
  at("length-pick").hidden = lengths.length < 2;
  const boxes = rules.filter((rule) => ranked.includes(rule)).map((rule) => {
    const chip = document.createElement("label");
    const box = Object.assign(document.createElement("input"), { type: "checkbox", checked: shown.has(rule), value: rule });
    chip.className = "chip";
    chip.title = rule;
    chip.append(box, called(rule));
    box.addEventListener("change", () => {
      shown[box.checked ? "add" : "delete"](rule);
      repaintShown();
    });
    at("rule-toggles").append(chip);
    return box;
  });
  for (const [text, wanted] of [["all", true], ["none", false]]) {
    const button = Object.assign(document.createElement("button"), { type: "button", textContent: text });
    button.addEventListener("click", () => {
      boxes.forEach((box) => {
        box.checked = wanted;
        shown[wanted ? "add" : "delete"](box.value);
      });
      repaintShown();
    });
    at("rule-toggles").append(button);
  }

  // ACC and BWT over the stream --------------------------------------------------------------------------------------
  const course = (id, key, from) => draw(id, () => {
    const traces = [];
    for (const c of courses().filter((one) => shown.has(one.rule))) {
      const { color, dash, symbol } = look(ruleIndex(c.rule));
      const x = c[key].map((_, k) => k + 1).slice(from - 1);
      const mean = c[key].slice(from - 1), std = c[`${key}_std`].slice(from - 1);
      if (c.orders > 1) traces.push({
        x: x.concat([...x].reverse()),
        y: mean.map((m, k) => m + std[k]).concat(mean.map((m, k) => m - std[k]).reverse()),
        fill: "toself", fillcolor: clear(color, 0.13), line: { width: 0 }, mode: "lines", hoverinfo: "skip", showlegend: false,
      });
      traces.push({
        x, y: mean, customdata: std, name: called(c.rule), mode: "lines+markers", line: { color, dash, width: 2.2 }, marker: { symbol, size: 7, color },
        hovertemplate: c.orders > 1 ? "%{y:.1f} ± %{customdata:.1f}" : "%{y:.1f}",
      });
    }
    return { traces, layout: { hovermode: "x unified", xaxis: { title: { text: "tasks folded in" }, dtick: 1 }, yaxis: { title: { text: key.toUpperCase() } } } };
  });
  const drawAcc = course("acc-chart", "acc", 1), drawBwt = course("bwt-chart", "bwt", 2);

  // Task by task: rules as marks on a bar from base to expert ---------------------------------------------------------
  const drawTasks = draw("task-chart", () => {
    const drawn = courses().filter((c) => shown.has(c.rule));
    const tasks = data.tasks.filter((task) => courses().every((c) => task in c.by_task));
    const rows = tasks.map((_, row) => row);
    const end = (name, values, color) => ({
      x: tasks.map((task) => values[task]), y: rows, text: tasks, name, mode: "markers", marker: { symbol: "line-ns", size: 17, color, line: { width: 3, color } }, hovertemplate: `%{text}: ${name} %{x:.1f}<extra></extra>`,
    });
    // Marks of one task lie a little apart, so that equal ones can be told.
    const apart = (k) => (drawn.length > 1 ? (k / (drawn.length - 1) - 0.5) * 0.5 : 0);
    return {
      traces: [
        end("experts", data.experts, tone("ink")),
        end("base", data.base, tone("soft")),
        ...drawn.map((c, k) => {
          const { color, symbol } = look(ruleIndex(c.rule));
          return { x: tasks.map((task) => c.by_task[task]), y: rows.map((row) => row + apart(k)), text: tasks, name: called(c.rule), mode: "markers", marker: { symbol, size: 9, color }, hovertemplate: `%{text}: ${called(c.rule)} %{x:.1f}<extra></extra>` };
        }),
      ],
      layout: {
        showlegend: true,
        legend: { orientation: "h", yref: "container", y: 0, yanchor: "bottom", x: 0.5, xanchor: "center" },
        margin: { l: 48, r: 14, t: 14, b: narrow() ? 120 : 90 },
        shapes: tasks.map((task, row) => ({ type: "rect", layer: "below", x0: data.base[task], x1: data.experts[task], y0: row - 0.34, y1: row + 0.34, fillcolor: tone("tint"), line: { width: 0 } })),
        xaxis: { title: { text: "accuracy", standoff: 8 } },
        yaxis: { tickvals: rows, ticktext: tasks.map(brief), range: [tasks.length - 0.5, -0.5], showgrid: false, zeroline: false },
      },
    };
  });
  const repaintShown = () => { drawAcc(); drawBwt(); drawTasks(); };

  // Accuracy matrix --------------------------------------------------------------------------------------------------
  const streams = (rule) => data.streams.filter((s) => s.rule === rule && s.order.length === length);
  const fillMatrixChoices = () => {
    const before = at("matrix-rule").value;
    options(at("matrix-rule"), ranked.map((rule) => [rule, called(rule)]), ranked.includes(before) ? before : ranked[0]);
    const numbers = streams(at("matrix-rule").value).map((s) => s.number);
    const pairs = numbers.map((n) => [n, `order ${n + 1}`]);
    options(at("matrix-order"), numbers.length > 1 ? [["mean", "mean of all, by position"], ...pairs] : pairs, at("matrix-order").value || "0");
  };
  fillMatrixChoices();
  const drawMatrix = draw("matrix-chart", () => {
    const all = streams(at("matrix-rule").value);
    const number = at("matrix-order").value;
    const mean = number === "mean";
    const one = all.find((s) => String(s.number) === number) || all[0];
    const places = one.order.map((_, i) => i);
    const value = (k, i) => (i > k ? null : mean ? all.reduce((sum, s) => sum + s.matrix[k][i], 0) / all.length : one.matrix[k][i]);
    const names = mean ? places.map((i) => `task ${i + 1}`) : one.order.map(brief);
    const lowest = Math.min(...all.flatMap((s) => s.matrix.flat()));
    return {
      traces: [{
        type: "heatmap", x: places, y: places, z: places.map((k) => places.map((i) => value(k, i))), zmin: Math.floor(lowest / 10) * 10, zmax: 100, colorscale: scale(), xgap: 2, ygap: 2,
        texttemplate: places.length < 13 ? "%{z:.0f}" : "", hoverongaps: false, text: places.map((k) => places.map((i) => `${names[i]} after ${names[k]}`)), hovertemplate: "%{text}: %{z:.1f}<extra></extra>", colorbar: { thickness: 10, outlinewidth: 0 },
      }],
      layout: {
        xaxis: { tickvals: places, ticktext: names, showgrid: false, zeroline: false, title: { text: "task", standoff: 12 } },
        yaxis: { tickvals: places, ticktext: names, showgrid: false, zeroline: false, autorange: "reversed", title: { text: "after folding in", standoff: 12 } },
      },
    };
  });
  at("matrix-rule").addEventListener("change", () => { fillMatrixChoices(); drawMatrix(); });
  at("matrix-order").addEventListener("change", drawMatrix);
  at("length").addEventListener("change", () => {
    length = Number(at("length").value);
    fillMatrixChoices();
    repaintShown();
    drawMatrix();
  });

  // Histograms and losses of trajectories ----------------------------------------------------------------------------
  const histogram = (id, key, label) => draw(id, () => {
    const x = [], y = [];
    // The last point of a trajectory repeats the values of the step before it.
    data.trajectories.forEach((p) => p.times.slice(0, -1).forEach((t, i) => { x.push(t); y.push(p[key][i]); }));
    const right = Math.max(0.05, ...x);
    const top = key === "gammas" ? 1 : Math.max(0.05, ...y);
    return {
      traces: [{ type: "histogram2d", x, y, xbins: { start: 0, end: right * 1.0001, size: right / 14 }, ybins: { start: 0, end: top * 1.0001, size: top / 14 }, autobinx: false, autobiny: false, colorscale: scale(), colorbar: { thickness: 10, outlinewidth: 0, title: { text: "points", font: { size: 11 } } }, hovertemplate: `t %{x}<br>${label} %{y}<br>%{z} points<extra></extra>` }],
      layout: { xaxis: { title: { text: "t" }, showgrid: false }, yaxis: { title: { text: label }, showgrid: false } },
    };
  });
  if (data.trajectories.length) {
    histogram("gamma-chart", "gammas", "γ");
    histogram("alignment-chart", "alignments", "alignment");
    const key = (p) => `${called(p.rule)}, order ${p.number + 1}, ${p.length} tasks`;
    const keys = [...new Set(data.trajectories.map(key))];
    options(at("path-stream"), keys.map((k) => [k, k]), keys[keys.length - 1]);
    const paint = drawLoss(() => data.trajectories.filter((p) => key(p) === at("path-stream").value));
    at("path-stream").addEventListener("change", paint);
  }

  // The operating-point explorer -------------------------------------------------------------------------------------
  if (data.sweep) {
    const { times, order, accuracies, weights } = data.sweep;
    const mean = weights.reduce((a, b) => a + b, 0) / weights.length;
    const knobs = [...document.querySelectorAll(".knob[data-task]")];
    const slider = (knob) => knob.querySelector("input");
    const value = (task, t) => {
      const right = Math.max(1, times.findIndex((one) => one >= t));
      const share = (t - times[right - 1]) / (times[right] - times[right - 1]);
      return (1 - share) * accuracies[task][right - 1] + share * accuracies[task][right];
    };
    const utilities = () => knobs.map((knob) => Number(slider(knob).value));
    const weighted = (t, w) => order.reduce((sum, task, i) => sum + w[i] * value(task, t), 0) / w.reduce((a, b) => a + b, 0);
    // Between two recorded times everything is a straight line, so the best time is a recorded one.
    const best = (w) => times.reduce((top, t) => (weighted(t, w) > weighted(top, w) + 1e-9 ? t : top), times[0]);
    const schedule = (w) => w[w.length - 1] / w.reduce((a, b) => a + b, 0);
    const drawExplorer = draw("explorer-chart", () => {
      const w = utilities(), t = Number(at("time").value), arrival = order[order.length - 1];
      const fine = times.concat([t, schedule(w)]).sort((a, b) => a - b);
      const stop = (x, color, dash, text, place) => ({
        shape: { type: "line", x0: x, x1: x, y0: 0, y1: 1, yref: "paper", line: { color, dash, width: 2 } },
        annotation: { x, y: 1 + 0.055 * place, yref: "paper", yanchor: "bottom", text, showarrow: false, font: { color, size: 12 }, xanchor: x > 0.85 ? "right" : x < 0.08 ? "left" : "center" },
      });
      const stops = [
        stop(schedule(w), tone("warm"), "dash", "schedule", 0),
        stop(best(w), palette()[2], "dot", "best", 1),
        stop(t, tone("accent"), "solid", "your t", 2),
      ];
      return {
        traces: [
          ...order.map((task, i) => ({
            x: times, y: accuracies[task], name: task, mode: "lines", hovertemplate: `${task} %{y:.1f}<extra></extra>`,
            line: { width: task === arrival ? 2.4 : 1.3, dash: task === arrival ? "solid" : DASHES[(i + 1) % DASHES.length], color: task === arrival ? tone("warm") : clear(palette()[(i + 3) % palette().length], 0.8) },
          })),
          { x: fine, y: fine.map((one) => weighted(one, w)), name: "ACC<sub>w</sub>", mode: "lines", line: { color: tone("ink"), width: 4 }, hovertemplate: "ACC_w %{y:.1f}<extra></extra>" },
        ],
        layout: {
          showlegend: true,
          legend: { orientation: "h", yref: "container", y: 0, yanchor: "bottom", x: 0.5, xanchor: "center" },
          margin: { l: 48, r: 14, t: 70, b: narrow() ? 110 : 90 },
          shapes: stops.map((s) => s.shape),
          annotations: stops.map((s) => s.annotation),
          xaxis: { title: { text: "operating time t" }, range: [-0.005, 1.005], zeroline: false },
          yaxis: { title: { text: "accuracy" } },
        },
      };
    });
    const update = () => {
      const w = utilities(), t = Number(at("time").value);
      at("time-value").textContent = fixed(t, 3);
      at("acc-here").textContent = fixed(weighted(t, w));
      at("t-schedule").textContent = fixed(schedule(w), 3);
      at("acc-schedule").textContent = fixed(weighted(schedule(w), w));
      at("t-best").textContent = fixed(best(w), 3);
      at("acc-best").textContent = fixed(weighted(best(w), w));
      knobs.forEach((knob) => {
        const here = value(knob.dataset.task, t);
        knob.querySelector("output").textContent = Number(slider(knob).value).toFixed(2);
        const meter = knob.querySelector(".meter");
        meter.style.setProperty("--v", `${here}%`);
        meter.textContent = fixed(here);
      });
      command(t, w);
      drawExplorer();
    };
    // The weight that makes w/Σw the chosen time, the earlier tasks keeping theirs.
    const quoted = (text) => (/^[\w.@/-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`);
    const command = (t, w) => {
      const arrival = order[order.length - 1], weight = (w.slice(0, -1).reduce((a, b) => a + b, 0) * t) / (1 - t);
      const words = t === 0 ? "# t = 0: leave the arrival out" : t === 1 ? "# t = 1: deploy the arrival itself" : `mergeway add TRUNK ARRIVAL --task ${quoted(arrival)} --weight ${Number(weight.toPrecision(4))} --data DATA`;
      // A line may break between words, not behind the dashes of an option.
      at("command").replaceChildren(...words.split(" ").flatMap((word) => [" ", Object.assign(document.createElement("span"), { textContent: word })]).slice(1));
    };
    at("copy").addEventListener("click", async () => {
      getSelection().selectAllChildren(at("command"));
      try {
        await navigator.clipboard.writeText(at("command").textContent);
        at("copy").textContent = "Copied";
        setTimeout(() => { at("copy").textContent = "Copy"; }, 1500);
      } catch {
        // Without leave to write to the clipboard the command stays selected.
      }
    });
    const go = (t) => { at("time").value = t; update(); };
    const reset = () => {
      // The slider holds utilities of mean 1; only their ratios count.
      knobs.forEach((knob, i) => { slider(knob).value = weights[i] / mean; });
      go(schedule(utilities()));
    };
    document.querySelectorAll("#explorer input").forEach((input) => input.addEventListener("input", update));
    at("go-schedule").addEventListener("click", () => go(schedule(utilities())));
    at("go-best").addEventListener("click", () => go(best(utilities())));
    at("reset").addEventListener("click", reset);
    reset();
  }
  recolour();
})();
