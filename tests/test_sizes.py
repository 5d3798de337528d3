from lit_rlsched.text import format_bytes, parse_bytes


def test_sizes_that_people_write():
    assert parse_bytes("2GiB", "memory") == 2 << 30
    assert parse_bytes("1.5 MB", "memory") == 1_500_000
    assert parse_bytes(4096, "memory") == 4096
    assert parse_bytes("1e9", "memory") == 10**9
    assert parse_bytes("2TiB", "memory") == 2 << 40


def test_sizes_that_people_read():
    assert [format_bytes(n) for n in (0, 7, 1536, 5 << 20, 3 << 29)] == [
        "-",
        "7 B",
        "1.50 KiB",
        "5.00 MiB",
        "1.50 GiB",
    ]
