"""Multi-token prediction: NextN blocks of a target (DeepSeek-V3), and Gemma 4's assistants."""

from specrun.runtime.drafters.mtp.assistant import Assistant, AssistantSource, check_assistant
from specrun.runtime.drafters.mtp.blocks import MtpSource, SharedNextn, multiplied_of_block
from specrun.runtime.drafters.mtp.build import build_mtp, reads_own_blocks
