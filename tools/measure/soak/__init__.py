"""`measure soak`: one process that answers for hours, with faults, and must not change."""
