"""Making arrivals: fine-tuning a suite's model on a task, in the tangent space or not, with its Adam moments."""

from mergeway.model.tangent import Tangent as Tangent
from mergeway.train.loop import Finetuned as Finetuned
from mergeway.train.loop import finetune as finetune
from mergeway.train.training import Training as Training
