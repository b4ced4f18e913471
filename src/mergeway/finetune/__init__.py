"""Making arrivals: fine-tuning a suite's model on a task, in the tangent space or not, with its Adam moments."""

from mergeway.finetune.loop import Finetuned as Finetuned
from mergeway.finetune.loop import finetune as finetune
from mergeway.finetune.training import Training as Training
from mergeway.tangent import Tangent as Tangent
