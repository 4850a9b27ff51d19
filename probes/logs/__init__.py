"""Finished logs of training as runs, in whatever format they were written."""

from probes.logs.rates import Ramp
from probes.logs.reader import LOSS_UNITS, read_loss_log
from probes.logs.run_log import RunLog
from probes.logs.table import LossLogError

__all__ = ["LOSS_UNITS", "LossLogError", "Ramp", "RunLog", "read_loss_log"]
