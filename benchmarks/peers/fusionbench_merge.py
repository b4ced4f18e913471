"""A continual merge by FusionBench's own classes and its own settings, on CLIP vision towers on disk.

Runs in an environment of FusionBench. Its settings for a method are read from the package; three are changed: the models come
in the order given, nothing is evaluated (there is no data), and options named on the command line. Model pool, profiler,
TensorBoard log and the checkpoint after every arrival are as it has them. The last line printed is its own profile, in seconds.

    python fusionbench_merge.py OUT METHOD key=value,... BASE ARRIVAL...
"""

import json
import sys
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace

import lightning
from fusion_bench.modelpool import CLIPVisionModelPool
from fusion_bench.taskpool import CLIPVisionModelTaskPool
from fusion_bench.utils import instantiate
from lightning.fabric.loggers import TensorBoardLogger
from omegaconf import DictConfig, OmegaConf

out, method, options, base, *arrivals = sys.argv[1:]
Path(out).mkdir()
settings = OmegaConf.load(str(files("fusion_bench_config") / "method" / "opcm" / f"{method}.yaml"))
changed = OmegaConf.from_dotlist([pair for pair in options.split(",") if pair])
settings = OmegaConf.merge(settings, {"shuffle_order": False, "evaluate_on_every_step": False}, changed)
models = {"_pretrained_": base, **{f"task{k}": arrival for k, arrival in enumerate(arrivals)}}

algorithm = instantiate(settings)
logger = TensorBoardLogger(root_dir=out, name="", version="", default_hp_metric=False)
algorithm.fabric = lightning.Fabric(devices=1, loggers=logger)
# All the classes want of a program is its task pool, and all they want of that is which data it has: none.
pool = CLIPVisionModelTaskPool(DictConfig({}), processor=None, clip_model=None)
algorithm._program = SimpleNamespace(taskpool=pool)
algorithm.run(CLIPVisionModelPool(DictConfig(models)))

profile = algorithm.profiler.recorded_durations if hasattr(algorithm, "profiler") else {}
print(json.dumps({action: sum(durations) for action, durations in profile.items()}))
