"""Keep a trunk: fold in what arrives, look back, take one out, undo, export.

python examples/keep_a_trunk.py
"""

import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

import mergeway as mw

torch.manual_seed(0)
folder = Path(tempfile.mkdtemp(prefix="mergeway-example-"))
base = {"up.weight": torch.randn(64, 32), "up.bias": torch.zeros(64), "down.weight": torch.randn(32, 64)}
save_file(base, folder / "base.safetensors")
for task in ("mnist", "svhn", "dtd"):
    save_file({n: w + 0.01 * torch.randn_like(w) for n, w in base.items()}, folder / f"{task}.safetensors")

trunk = mw.Trunk.create(folder / "trunk", base=folder / "base.safetensors", rule=mw.rules.Iso(scaling=0.8), keep=3)
trunk.add(folder / "mnist.safetensors")
trunk.add(folder / "svhn.safetensors", weight=2.0)

# Another day, another process: the trunk knows where it stands.
trunk = mw.Trunk.open(folder / "trunk")
trunk.add(folder / "dtd.safetensors")
trunk.remove("mnist", folder / "mnist.safetensors")
print("holds", [arrival.task for arrival in trunk.folded()])

trunk.rollback(3)
print("holds", [arrival.task for arrival in trunk.folded()])

for record in trunk.log():
    print(record.step, record.kind, record.task or "", record.result[:12])

trunk.export(folder / "deployed")
print("intact" if not trunk.verify() else trunk.verify())
print("deployed model in", folder / "deployed")
