"""Show the checkout to editors and type checkers, in the environment that runs this.

An editable install is found by a hook that only Python itself runs. A folder of links, named in a
.pth file, is found by all: `specrun` in it holds a link to each of the checkout's packages.
"""

from __future__ import annotations

import sysconfig
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = "specrun_checkout"


def main() -> None:
    """Write the links and the .pth file anew."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    places = {name: ROOT / folder for name, folder in settings["package-dir"].items()}
    own = places.pop("specrun")
    links = {name.removeprefix("specrun."): place for name, place in places.items()}
    links |= {path.name: path for path in own.iterdir() if path.is_file()}
    site = Path(sysconfig.get_path("purelib"))
    folder = site / FOLDER / "specrun"
    folder.mkdir(parents=True, exist_ok=True)
    for link in folder.iterdir():
        if link.is_symlink():
            link.unlink()
    for name, path in links.items():
        (folder / name).symlink_to(path)
    (site / f"{FOLDER}.pth").write_text(f"{FOLDER}\n")


if __name__ == "__main__":
    main()
