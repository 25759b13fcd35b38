"""Does this machine or cluster train correctly with a layout? Checks to make before a long run (scripts/doctor.py).

machine.py      checks of one machine: versions, GPU driver, compiler, kernels, disk, shared memory; no Ray, no model
tiny.py         a small model of the bound architecture, and the bound experiment with this model
examination.py  from gin files to findings, in order
cluster.py      checks that need the running layout; actors.py, worker.py: OpenRLHF's actors with methods for them
parity.py       compares the layout's gradient with the plain computation
finding.py      the result of a check; remembers successful examinations: train.py prints a line where there is none
"""
