"""A CUDA that is not there, and what is proven with it: the order of the loaders' work on a GPU.

`simulated(schedule)` puts it in torch's place. Work is queued on streams and done by the CPU: at once, or,
on the streams that the schedule names, as late as CUDA may do it, when somebody waits for it. Memory that
nothing has written is poison. So what goes wrong on a GPU now and then goes wrong here each time.
"""
