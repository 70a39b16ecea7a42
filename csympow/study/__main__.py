"""`python -m csympow.study --out=DIR`: see `csympow.study`."""

from csympow.study.program import main

if __name__ == "__main__":
  main()
