"""Set-up of a checkout, run by the Makefile before anything is installed: standard library only."""
