"""Each module looks at one side of a machine: ``look(wanted)`` returns facts as JSON can hold them."""
