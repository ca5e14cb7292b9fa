-- Store a chunk with the expiry of its blob.
-- KEYS  1 prefix
-- ARGV  1 blob  2 index  3 bytes
-- Returns 1, or 0 if the blob was not begun or has expired.
local blob = P .. 'blob:' .. A[1]
local b = call('HMGET', blob, 'expires', 'chunks')
if not b[1] then return 0 end
call('SET', blob .. ':' .. A[2], A[3], 'PXAT', b[1])
if A[2] + 1 > tonumber(b[2]) then call('HSET', blob, 'chunks', A[2] + 1) end
return 1
