"""Models as llama.cpp loads them: vocabulary, adapters, NextN blocks, trials of files."""

from typing import TYPE_CHECKING

from specrun.bindings.faces import lazy_face

if TYPE_CHECKING:
    from specrun.bindings.models.model import LoraFile, Model, rope_factor, watched_loading
    from specrun.bindings.models.model_checks import check_model
    from specrun.bindings.models.nextn import (
        ROLLBACK_ARCHITECTURES,
        NextnBlocks,
        read_nextn,
        split_headers,
    )
    from specrun.bindings.models.trial import is_known_file, remember_written, trusting_files
    from specrun.bindings.models.vocabulary import Vocabulary, stored_fingerprint

__getattr__, __dir__ = lazy_face(__name__)
