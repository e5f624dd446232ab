"""Multi-token prediction (DeepSeek-V3): a target's own NextN blocks draft."""

from specrun.runtime.drafters.mtp.drafter import MtpDrafter, build_mtp, reads_own_blocks
