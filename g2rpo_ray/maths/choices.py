"""Names of what the formulas offer, for settings: no library is needed to check one."""

from typing import Literal

SdeKind = Literal["flow", "dance", "cps"]
LogProbForm = Literal["gaussian", "squared_error"]
Normalisation = Literal["std", "mean_only"]
Combination = Literal["advantages", "rewards"]
StepWeight = Literal["uniform", "noise", "inverse_dt"]
WindowSchedule = Literal["progressive", "decaying", "random"]
StepChoice = Literal["all", "first", "random"]
