-- A node tells whose data lies on its data root: the home of threads that have none here.
-- KEYS  1 prefix
-- ARGV  1 data id  2… digest of a thread, epoch of its last owner there
-- Returns how many have their home there now and had it nowhere, or elsewhere with an older owner.
--@use time
local told = 0
for i = 2, #A, 2 do
  local thread = P .. 'thread:' .. A[i]
  local t = call('HMGET', thread, 'epoch', 'data_id', 'told')
  if t[2] == A[1] then
    keep(thread, KEEP)
  elseif not t[1] and (not t[2] or tonumber(t[3] or 0) < tonumber(A[i + 1])) then
    call('HSET', thread, 'data_id', A[1], 'told', A[i + 1])
    call('PEXPIRE', thread, KEEP)
    told = told + 1
  end
end
return told
