"""`python -m lit_rlsched` is `lit-rlsched`."""

from lit_rlsched.cli import main

if __name__ == "__main__":
    main()
