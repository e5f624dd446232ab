"""`specrun doctor`: checks of the installation and the machine."""
