"""The runtime in virtual time: thousands of schedules of faults a minute, each repeatable from its seed.

`python -m tests.simulation --schedules 100000 --seed 0`

"""
