"""The least that an average of checkpoints can be: read them, average them, write the result. Nothing is checked.

python bare_average.py OUT CHECKPOINT...
"""

import sys
from pathlib import Path

from safetensors.torch import load_file, save_file

out, *references = sys.argv[1:]
models = [load_file(f"{reference}/model.safetensors") for reference in references]
merged = {name: sum(model[name] for model in models) / len(models) for name in models[0]}
Path(out).mkdir()
save_file(merged, f"{out}/model.safetensors", metadata={"format": "pt"})
