"""``python -m benchmarks.parity``: see `bench`."""

from benchmarks.parity.bench import main

if __name__ == "__main__":
    main()
