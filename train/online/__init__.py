"""Online learning (Liu et al. 2023): a drafter learns where its drafts were rejected."""

from specrun.train.online.learner import OnlineRecipe, OnlineReport
from specrun.train.online.online_drafter import (
    OnlineDrafter,
    OnlineSettings,
    OnlineUpdate,
    open_online_drafter,
)
