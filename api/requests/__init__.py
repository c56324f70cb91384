"""What a client asks for: checked, admitted, recorded, answered."""
