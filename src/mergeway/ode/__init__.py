"""ODE-M: a merge as a barrier-aware trajectory in parameter space."""

from mergeway.ode.path import Trajectory as Trajectory
from mergeway.ode.path import trajectory as trajectory
from mergeway.ode.schedule import operating_time as operating_time
