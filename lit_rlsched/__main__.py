"""The command `lit-rlsched`, also as `python -m lit_rlsched`."""

import sys

from lit_rlsched.cli.quick import answer


def main(args: list[str] | None = None) -> None:
    """Run the command line.

    Args:
        args: Arguments in place of `sys.argv`.
    """
    answer(sys.argv[1:] if args is None else args)
    from lit_rlsched.cli import (
        main as cli,  # takes seconds: it imports torch, Lightning and transformers
    )

    cli.main(args)


if __name__ == "__main__":
    main()
