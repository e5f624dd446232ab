"""The frozen target, a Hugging Face folder or a GGUF file: its states, matrices and answers."""

from specrun.train.target.head_target import HeadTarget, open_head_target
from specrun.train.target.shape import source_identity
