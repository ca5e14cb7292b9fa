-- A blank sandbox is no more: its place is free.
-- KEYS  1 prefix
-- ARGV  1 node  2 incarnation  3 slot
-- Returns 1, or 0 when it was not known.
--@use time line blanks
local ms = now_ms()
if call('HGET', P .. 'node:' .. A[1], 'incarnation') ~= A[2] then return 0 end
if not drop_blank(A[1], A[3]) then return 0 end
kick(ms)
return 1
