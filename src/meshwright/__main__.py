"""`python -m meshwright` is `meshwright`."""

from meshwright.cli import main

main()
