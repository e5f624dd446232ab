"""Models on this disk and on the hub: their names, stores, downloads, and which fit each other."""

from typing import TYPE_CHECKING

from specrun.bindings.faces import lazy_face

if TYPE_CHECKING:
    from specrun.runtime.models.hub import HubName, fetch_model, without_hub
    from specrun.runtime.models.model_set import is_set, read_set
    from specrun.runtime.models.names import (
        ModelEntry,
        answers_alone,
        catalogue,
        could_draft,
        is_hub_name,
        locate_model,
        looks_like_path,
        matching,
    )
    from specrun.runtime.models.packaged import (
        PackagedModel,
        fetch_packaged,
        find_packaged,
        is_there,
        shipped_heads,
    )
    from specrun.runtime.models.pairing import (
        check_blocks,
        check_draftable,
        check_pair,
        check_same_vocabulary,
    )
    from specrun.runtime.models.stores import StoredModel, folder_models, stored_models

__getattr__, __dir__ = lazy_face(__name__)
