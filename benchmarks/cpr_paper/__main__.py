"""``python -m benchmarks.cpr_paper``: see `benchmarks.cpr_paper.experiment`."""

from benchmarks.cpr_paper.experiment import main

if __name__ == "__main__":
    main()
