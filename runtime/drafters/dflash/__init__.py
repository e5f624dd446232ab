"""Block drafters: DFlash, DFlash2 and DSpark draft a whole block in one evaluation."""
