"""The page at `/`: chat, and beside it the draft tree of each round."""

from specrun.cli.serve.page.routes import page_routes
