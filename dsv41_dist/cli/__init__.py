"""The command line: rehearse, preflight, bench, doctor, adapters."""
