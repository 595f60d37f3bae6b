"""A simulated CUDA, and the tests of the order of the loaders' work on a GPU that use it.

`simulated(schedule)` replaces torch's CUDA. The CPU does the work that is queued on streams: at once or, on
the streams that the schedule names, as late as CUDA may do it, when something waits for it. Memory that
nothing has written is filled with POISON. A fault that a GPU shows now and then is shown here every time.
"""
