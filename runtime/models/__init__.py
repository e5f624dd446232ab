"""Models that people already have, and those of the hub: found, named, described and fetched."""

from specrun.runtime.models.catalogue import ModelEntry, catalogue
from specrun.runtime.models.hub import Progress, fetch_model, is_offline, without_hub
from specrun.runtime.models.hub_files import HUB_PREFIX, HubName
from specrun.runtime.models.names import locate_model
from specrun.runtime.models.stores import StoredModel, StoredModels, stored_models
