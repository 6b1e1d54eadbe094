"""`python -m flash4_torch.integrations.hub FOLDER` writes the kernel's repository to a new folder."""

import argparse

from . import NAME, write


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m flash4_torch.integrations.hub", description=__doc__)
    parser.add_argument("folder", help=f"a folder that does not exist; its name should be {NAME}")
    given = parser.parse_args()
    try:
        print(write(given.folder))
    except FileExistsError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
