"""What runs inside the sandbox: standard library only, started as a script, never importing the rest of `trl_gmts`."""
