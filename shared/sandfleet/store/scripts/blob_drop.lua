-- Remove a blob's chunks, up to 1000 a call, and give its bytes back.
-- KEYS  1 prefix
-- ARGV  1 blob
-- Returns 1 while chunks are left.
--@use time route blobs
local blob = P .. 'blob:' .. A[1]
local b = call('HMGET', blob, 'member', 'chunks')
if not b[1] then return 0 end
local last = tonumber(b[2]) - 1
local first = math.max(0, last - 999)
for i = first, last do call('DEL', blob .. ':' .. i) end
if first > 0 then
  call('HSET', blob, 'chunks', first)
  return 1
end
call('DEL', blob)
if call('ZSCORE', P .. 'blobs', b[1]) then give_back(b[1]) end
return 0
