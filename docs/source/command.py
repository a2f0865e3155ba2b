"""The command line of `python -m docs.source`.

    python -m docs.source promises           # the tests of each promise in docs/reliability.md, from their marks
    python -m docs.source pictures           # docs/orders.png, and the figures that stand beside it
    python -m docs.source site               # README, docs/ and the reference as a site, in build/site

Exit status: 1 where the site has a broken link, 2 for bad arguments.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CONFIG = Path(__file__).with_name("mkdocs.yml")


def main(argv: list[str] | None = None) -> int:
    """Makes what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("promises", "pictures", "site"))
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "site", help="of the site (default %(default)s)")
    args = parser.parse_args(argv)
    if args.what == "promises":
        from docs.source import promises

        promises.PAGE.write_text(promises.render_promises(promises.PAGE.read_text()))
        print(f"wrote {promises.PAGE}")
        return 0
    if args.what == "pictures":
        from docs.source.pictures import make_pictures

        make_pictures(ROOT / "docs")
        return 0
    return make_site(args.out)


def make_site(out: Path) -> int:
    """Builds the site; what MkDocs warns of, such as a broken link, is an error; `--quiet` would hide it."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", CONFIG, "-d", out.absolute()]
    quiet = {"NO_MKDOCS_2_WARNING": "1"}  # of the theme's end of life, see pyproject.toml
    done = subprocess.run(command, cwd=ROOT, env=os.environ | quiet, check=False)
    if done.returncode == 0:
        print(f"wrote {out}: open {out / 'index.html'}")
    return int(done.returncode != 0)
