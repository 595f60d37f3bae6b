"""What a sample may be labelled with.

    class     one class: its index is the label
    classes   any number of classes: their indices, `ragged`
    number    a number or a vector of them, to be predicted: `float` or `vector`
    none      nothing

The last three have label -1.
"""

TARGETS = ("class", "classes", "number", "none")
