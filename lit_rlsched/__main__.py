"""The command `lit-rlsched`, also as `python -m lit_rlsched`."""

import sys

from lit_rlsched.cli.quick import answer


def main(args: list[str] | None = None) -> None:
    """Run the command line with these arguments, or those of `sys.argv`."""
    answer(sys.argv[1:] if args is None else args)
    from lit_rlsched.cli import main as cli  # seconds: torch, Lightning and transformers

    cli.main(args)


if __name__ == "__main__":
    main()
