"""Planning: how much to draft, and where the layers go, from what the machine and the context allow."""
