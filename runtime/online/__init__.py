"""Online speculative decoding (Liu et al. 2023): what drafts got wrong, kept to learn from."""

from specrun.runtime.online.buffer_file import (
    BUFFER_NAME,
    BufferFacts,
    BufferKey,
    kept_folders,
    learn_folder,
    load_rejections,
    read_facts,
    save_rejections,
)
from specrun.runtime.online.rejections import (
    MOST_BYTES,
    KeptLaws,
    RejectedAnswer,
    RejectionBuffer,
    likeliest,
)
from specrun.runtime.online.store import KEEP, LearnFrom, RejectionStore, open_rejections
