"""Medusa (Cai et al. 2024): heads that each guess one of the next tokens."""

from specrun.runtime.drafters.medusa.drafter import build_medusa
from specrun.runtime.drafters.medusa.medusa_head import MedusaHead
