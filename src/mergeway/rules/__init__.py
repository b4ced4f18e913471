"""The merging rules. A rule of your own is a `PartRule` or a `ModelRule`; see CONTRIBUTING.md, "Adding a rule"."""

from mergeway.rules.average import Average as Average
from mergeway.rules.dop import Dop as Dop
from mergeway.rules.fisher import Fisher as Fisher
from mergeway.rules.iso import Iso as Iso
from mergeway.rules.magmax import Magmax as Magmax
from mergeway.rules.ode.rule import Ode as Ode
from mergeway.rules.opcm import Opcm as Opcm
from mergeway.rules.randmix import Randmix as Randmix
from mergeway.rules.registry import RULES as RULES
from mergeway.rules.registry import Description as Description
from mergeway.rules.registry import find_rules as find_rules
from mergeway.rules.registry import make as make
from mergeway.rules.registry import reference as reference
from mergeway.rules.regmean import Regmean as Regmean
from mergeway.rules.rule import ByRows as ByRows
from mergeway.rules.rule import Fold as Fold
from mergeway.rules.rule import Incoming as Incoming
from mergeway.rules.rule import KeepsDeployed as KeepsDeployed
from mergeway.rules.rule import Merged as Merged
from mergeway.rules.rule import ModelRule as ModelRule
from mergeway.rules.rule import PartRule as PartRule
from mergeway.rules.rule import Removable as Removable
from mergeway.rules.rule import Rule as Rule
from mergeway.rules.rule import SeesMatrices as SeesMatrices
from mergeway.rules.rule import Settles as Settles
from mergeway.rules.rule import State as State
from mergeway.rules.rule import Surveys as Surveys
from mergeway.rules.rule import WantsAnswers as WantsAnswers
from mergeway.rules.rule import WantsGrams as WantsGrams
from mergeway.rules.rule import WantsMoments as WantsMoments
from mergeway.rules.rule import WantsSamples as WantsSamples
from mergeway.rules.steer import Steer as Steer
from mergeway.rules.task_arithmetic import TaskArithmetic as TaskArithmetic
from mergeway.rules.ties import Ties as Ties

RULES.update(find_rules())  # last: a package that adds a rule imports the names above
