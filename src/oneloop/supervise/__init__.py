"""A small process beside each training process, which sees that every death and every hang ends clearly."""
