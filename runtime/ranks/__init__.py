"""The processes of a divided model: started here, or by a launcher (torchrun, srun) whose rank 0 finds the others."""
