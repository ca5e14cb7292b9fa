-- A chunk was SET just before: give it the expiry of its blob, or drop it.
-- KEYS  1 prefix
-- ARGV  1 blob  2 index
-- Returns 1, or 0 if the blob was not begun or has expired.
local blob = P .. 'blob:' .. A[1]
local chunk = blob .. ':' .. A[2]
local b = call('HMGET', blob, 'expires', 'chunks')
if not b[1] then
  call('DEL', chunk)
  return 0
end
call('PEXPIREAT', chunk, b[1])
if A[2] + 1 > tonumber(b[2]) then call('HSET', blob, 'chunks', A[2] + 1) end
return 1
