"""Operations between the matrix products of every model."""
