"""The processes of a divided model: started here, or by a launcher (torchrun, srun); then rank 0 meets the others."""
