"""Judge a run of mutmut: every survivor must be listed with a reason, 85 % must be killed.

Run by `make mutants` after `mutmut run`. `--write` adds new survivors to the list, where somebody
then fills in the reason, and removes those that are gone.
"""

import csv
import sys
from collections import Counter
from pathlib import Path

from mutmut.mutation.data import SourceFileMutationData
from mutmut.mutation.diff_apply import get_diff_for_mutant
from mutmut.stats import status_by_exit_code
from mutmut.utils.file_utils import walk_mutatable_files
from mutmut.utils.format_utils import orig_function_and_class_names_from_key

LIST = Path("tests/mutants.csv")
LEAST = 0.85
KILLED = ("killed", "timeout", "segfault")
Survivor = tuple[str, str, str]
"""Function with module and class, its lines before, and its lines after the mutation."""


def describe(name: str, path: Path) -> Survivor:
    """A survivor, in words that stay the same when other code of the file changes."""
    function, owner = orig_function_and_class_names_from_key(name)
    diff = get_diff_for_mutant(name, path=path).splitlines()[2:]
    before, after = (
        " ".join(line[1:].strip() for line in diff if line.startswith(sign)) for sign in "-+"
    )
    module = path.relative_to("lit_rlsched").with_suffix("").as_posix().replace("/", ".")
    return ".".join(filter(None, (module, owner, function))), before, after


def main() -> int:
    """Print a table by file and what the list lacks; returns the exit status."""
    survivors: list[Survivor] = []
    print(f"{'file':<48}{'mutants':>8}{'killed':>8}{'timeout':>8}{'alive':>8}{'share':>8}")
    total: Counter[str] = Counter()
    for path in sorted(walk_mutatable_files()):
        data = SourceFileMutationData(path=path)
        data.load()
        found = Counter(status_by_exit_code[code] for code in data.exit_code_by_key.values())
        total += found
        if found:
            print_row(str(path), found)
        for name, code in data.exit_code_by_key.items():
            if status_by_exit_code[code] not in (*KILLED, "not checked"):
                survivors.append(describe(name, path))
    print_row("all", total)

    with LIST.open(newline="") as file:
        reasons = {(f, b, a): reason for f, b, a, reason in list(csv.reader(file))[1:]}
    if "--write" in sys.argv:
        rows = sorted((*key, reasons.get(key, "")) for key in dict.fromkeys(survivors))
        with LIST.open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(
                [("function", "before", "after", "reason"), *rows]
            )
    unexplained = [key for key in survivors if not reasons.get(key)]
    for function, before, after in unexplained:
        print(f"\nsurvived without a reason in {LIST}: {function}\n  - {before}\n  + {after}")
    gone = [] if total["not checked"] else reasons.keys() - set(survivors)
    for function, before, after in sorted(gone):
        print(f"\nlisted in {LIST}, but killed or gone: {function}\n  - {before}\n  + {after}")
    too_few = share(total) < LEAST
    if too_few:
        print(f"\n{share(total):.1%} were killed, and {LEAST:.0%} must be.")
    return int(bool(unexplained or gone or too_few or total["not checked"]))


def share(found: Counter[str]) -> float:
    """Killed ones of those that were tried."""
    tried = found.total() - found["not checked"]
    return sum(found[status] for status in KILLED) / tried if tried else 1.0


def print_row(name: str, found: Counter[str]) -> None:
    killed = sum(found[status] for status in KILLED) - found["timeout"]
    alive = found.total() - killed - found["timeout"] - found["not checked"]
    figures = "".join(f"{n:>8}" for n in (found.total(), killed, found["timeout"], alive))
    tried = found.total() > found["not checked"]
    print(f"{name:<48}{figures}{f'{share(found):.1%}' if tried else '-':>8}")


if __name__ == "__main__":
    sys.exit(main())
