"""ODE-M: a merge as a barrier-aware trajectory in parameter space."""

from mergeway.rules.ode.path import Trajectory as Trajectory
from mergeway.rules.ode.schedule import operating_time as operating_time
from mergeway.rules.ode.solve import trajectory as trajectory
