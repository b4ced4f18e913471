"""Forward-backward and forward-only passes over the calibration samples of two tasks in plain PyTorch; prints wall and CPU seconds.

python bare_passes.py SUITE SAMPLES BACKWARD FORWARD TASK TASK
"""

import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch.nn import functional
from transformers import CLIPVisionModelWithProjection
from transformers.utils.logging import disable_progress_bar

BATCH = 128

disable_progress_bar()
torch.set_num_threads(1)
suite, samples, backward, forward = Path(sys.argv[1]), *map(int, sys.argv[2:5])
settings = json.loads((suite / "suite.json").read_text())
rows = {row["name"]: row for row in settings["tasks"]}
model = CLIPVisionModelWithProjection.from_pretrained(suite / rows[sys.argv[5]]["expert"]).eval()
model.visual_projection.requires_grad_(False)
mean, std = (torch.tensor(settings[key]).view(1, 3, 1, 1) for key in ("image_mean", "image_std"))

batches = []
for task in sys.argv[5:7]:
    with np.load(suite / rows[task]["data"]) as file:
        x, y = file["x_train"][: samples // 2], file["y_train"][: samples // 2]
    pixels = (torch.from_numpy(x).permute(0, 3, 1, 2).float() / 255 - mean) / std
    labels, head = torch.from_numpy(y.astype(np.int64)), load_file(suite / rows[task]["head"])["weight"]
    for start in range(0, len(labels), BATCH):
        part = slice(start, start + BATCH)
        batches.append((pixels[part].contiguous(), labels[part], head, len(labels[part]) / (2 * len(labels))))


def loss_of(pixels, labels, head, share):
    features = functional.normalize(model(pixel_values=pixels).image_embeds, dim=-1)
    return share * functional.cross_entropy(settings["logit_scale"] * features @ head.mT, labels)


wall, cpu = time.perf_counter(), time.process_time()
for _ in range(backward):
    model.zero_grad(set_to_none=False)
    for batch in batches:
        loss_of(*batch).backward()
with torch.no_grad():
    for _ in range(forward):
        for batch in batches:
            loss_of(*batch)
print(time.perf_counter() - wall, time.process_time() - cpu)
